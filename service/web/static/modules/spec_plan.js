// A spec's plan as HTML of the server, and the problems of a refused one.

import { ApiError, leadToLogin } from "./api.js";

// HTML of the plan of a request as POST /v1/plans takes it, YAML or JSON. Raises ApiError.
export async function planFragment(text, signal) {
  let response;
  try {
    response = await fetch("/fragments/plan", {
      method: "POST", body: text, headers: { "content-type": "application/yaml" }, credentials: "same-origin", signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, {});
  }
  const content = await response.text();
  if (response.ok) return content;
  leadToLogin(response);
  throw new ApiError(response.status, problemOf(content, response.status));
}

function problemOf(content, status) {
  try {
    return JSON.parse(content);
  } catch {
    return { detail: `The service answered with status ${status}, without JSON.` };
  }
}

// Put HTML of this service, whose texts are escaped there, in place of an element's content.
export function showFragment(element, html) {
  element.replaceChildren(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
}

// The problems of a refused spec as a list: place, value and rule, and the remedy. `href` links a problem to its field.
export function problemList(error, href = () => null) {
  const box = document.createElement("div");
  box.className = "notice";
  box.dataset.kind = "error";
  if (!error.errors.length) {
    box.textContent = error.message;
    return box;
  }
  const title = document.createElement("strong");
  title.textContent = error.errors.length === 1 ? "One problem" : `${error.errors.length} problems`;
  const list = document.createElement("ul");
  list.className = "reasons";
  for (const problem of error.errors) {
    const item = document.createElement("li");
    const target = href(problem);
    const place = document.createElement(target ? "a" : "code");
    if (target) place.href = target;
    place.textContent = problem.path || "the whole spec";
    item.append(place, ` ${problem.rule}`, problem.remedy ? `; ${problem.remedy}` : "");
    list.append(item);
  }
  box.append(title, list);
  return box;
}
