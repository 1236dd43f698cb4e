// What every page has: messages, announcements, logging out, times that go on.

import { ApiError, leadToLogin, remove } from "./api.js";
import { ago } from "./format.js";

const TOAST_MS = 10_000;

// A message in words, until it is closed or, unless it is an error, has been there for a while.
export function toast(text, kind = "error") {
  const message = document.createElement("div");
  message.className = "toast";
  message.dataset.kind = kind;
  message.setAttribute("role", kind === "error" ? "alert" : "status");
  const words = document.createElement("span");
  words.textContent = text;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "button quiet small";
  close.textContent = "Close";
  close.addEventListener("click", () => message.remove());
  message.append(words, close);
  document.getElementById("toasts").append(message);
  if (kind !== "error") setTimeout(() => message.remove(), TOAST_MS);
  return message;
}

// For screen readers: what has changed without a new page.
export function announce(text) {
  document.getElementById("announcements").textContent = text;
}

// Ask before something that cannot be undone; resolves to whether the answer is yes. `items` are what it is done to.
export function ask({ title, words, verb, keep = "Keep it", items = [] }) {
  const part = (name) => document.getElementById(`question-${name}`);
  part("title").textContent = title;
  part("words").textContent = words;
  part("yes").textContent = verb;
  part("no").textContent = keep;
  part("items").replaceChildren(
    ...items.map((text) => Object.assign(document.createElement("li"), { textContent: text })),
  );
  part("items").hidden = !items.length;
  const dialog = document.getElementById("question");
  return new Promise((resolve) => {
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });
}

// A page, by default this one, as a fresh document. Raises ApiError; leads to the login.
export async function freshPage(path = location.href) {
  let response;
  try {
    response = await fetch(path, { headers: { accept: "text/html" }, redirect: "manual" });
  } catch {
    throw new ApiError(0, {});
  }
  if (response.type === "opaqueredirect") leadToLogin({ status: 401 });
  if (!response.ok) throw new ApiError(response.status, {});
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

// Replace an element's content by that of a new page, keeping the focus, if its element has an id or a name.
export function replaceContent(element, fresh) {
  const active = element.contains(document.activeElement) ? document.activeElement : null;
  const key = active && focusKey(active);
  element.replaceChildren(...fresh.childNodes);
  for (const name of element.getAttributeNames()) {
    if (name.startsWith("data-") && fresh.hasAttribute(name)) element.setAttribute(name, fresh.getAttribute(name));
  }
  if (key) [...element.querySelectorAll(active.tagName)].find((other) => focusKey(other) === key)?.focus({ preventScroll: true });
}

const focusKey = (element) => element.id || `${element.name ?? ""} ${element.value ?? ""} ${element.getAttribute("href") ?? ""}`;

function updateTimes() {
  for (const time of document.querySelectorAll("time[datetime]")) {
    const text = ago(time.dateTime);
    if (time.textContent !== text) time.textContent = text;
  }
}

// Copying what a command or a secret beside the button says

document.addEventListener("click", async ({ target }) => {
  const text = target.dataset?.copy;
  if (!text) return;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https, browsers offer only this.
    const range = document.createRange();
    range.selectNodeContents(target.previousElementSibling);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    document.execCommand("copy");
  }
  target.textContent = "Copied";
  announce("copied");
  setTimeout(() => (target.textContent = "Copy"), 2_000);
});

document.getElementById("log-out")?.addEventListener("click", async () => {
  try {
    await remove("/v1/session");
    location.assign("/login");
  } catch (error) {
    toast(error.message);
  }
});
setInterval(updateTimes, 10_000);
