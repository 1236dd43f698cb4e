// Webhooks: added, tested, disabled and removed; of one webhook, deliveries sent again.

import { post, remove } from "./api.js";
import { ask, freshPage, replaceContent, toast } from "./page.js";

const content = document.getElementById("content");
const form = document.getElementById("add-form");

async function refresh() {
  replaceContent(content, (await freshPage()).getElementById("content"));
}

// Actions on a webhook or a delivery

const outcome = ({ state, last_attempt: attempt }) =>
  `${state}: ${attempt.error ?? `answered ${attempt.status}`} in ${attempt.duration_ms} ms`;

const ACTIONS = {
  test: {
    send: async (path, name) => {
      const delivery = await post(`${path}/test`);
      toast(`Test of ${name} ${outcome(delivery)}`, delivery.state === "delivered" ? "success" : "error");
    },
  },
  enable: { send: (path) => post(`${path}/enable`) },
  disable: { send: (path) => post(`${path}/disable`) },
  repeat: { send: (path) => post(`${path}/repeat`) },
  remove: {
    send: (path) => remove(path), verb: "Remove webhook",
    words: "What it has not been sent yet is dropped, and its deliveries are no longer listed.",
  },
};

content.addEventListener("click", async ({ target }) => {
  const action = ACTIONS[target.dataset?.action];
  if (!action) return;
  const { name, path } = target.dataset;
  const { words, verb } = action;
  if (words && !(await ask({ title: `Remove ${name}?`, words, verb }))) return;
  target.disabled = true;
  try {
    await action.send(path, name);
    await refresh();
  } catch (error) {
    toast(error.message);
  } finally {
    target.disabled = false;
  }
});

// Adding

function fields() {
  const { name, url, format, labels, named } = form.elements;
  const checked = (group) => [...form.querySelectorAll(`input[name="${group}"]:checked`)].map(({ value }) => value);
  return {
    name: name.value.trim(), url: url.value.trim(), format: format.value, jobs: named.checked ? "named" : "all",
    events: checked("events"), states: checked("states"),
    labels: labels.value.split(",").map((label) => label.trim()).filter(Boolean),
  };
}

function showProblems(errors) {
  for (const place of form.querySelectorAll("[data-problem]")) {
    const problem = errors.find(({ path }) => path.split(/[.[]/)[0] === place.dataset.problem);
    place.textContent = problem ? `It ${problem.rule}${problem.remedy ? `; ${problem.remedy}` : ""}.` : "";
    for (const input of form.querySelectorAll(`[name="${place.dataset.problem}"]`)) {
      problem ? input.setAttribute("aria-invalid", "true") : input.removeAttribute("aria-invalid");
    }
  }
  form.querySelector("[aria-invalid]")?.focus();
}

function showSecret({ name, secret }) {
  const place = document.getElementById("secret");
  place.querySelector("code").textContent = secret;
  place.querySelector("[data-copy]").dataset.copy = secret;
  place.querySelector("strong").textContent = name;
  place.hidden = false;
  place.focus();
}

form?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button[type=submit]");
  button.disabled = true;
  try {
    const webhook = await post("/v1/webhooks", fields());
    form.reset();
    showProblems([]);
    showSecret(webhook);
    await refresh();
  } catch (error) {
    showProblems(error.errors ?? []);
    toast(error.message);
  } finally {
    button.disabled = false;
  }
});
