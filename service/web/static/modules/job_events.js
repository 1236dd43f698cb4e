// Earlier events of a job, page by page.

import { get } from "./api.js";
import { ago, moment, number } from "./format.js";
import { toast } from "./page.js";

export function startEvents(jobId) {
  const part = document.getElementById("events");
  part.addEventListener("click", async ({ target }) => {
    if (target.id !== "more-events") return;
    const list = document.getElementById("event-list");
    target.disabled = true;
    try {
      const page = await get(`/v1/jobs/${jobId}/history`, { cursor: list.dataset.cursor, limit: 100 });
      list.append(...page.items.map(line));
      list.dataset.cursor = page.next_cursor ?? "";
      part.dataset.extended = "yes"; // kept as it is from now on, newer events are in the stream's other parts
      if (!page.next_cursor) target.remove();
    } catch (error) {
      toast(error.message);
    } finally {
      target.disabled = false;
    }
  });
}

// As EventLine in service/web/pages/job.py.
function line({ time, kind, actor, data }) {
  const item = document.createElement("li");
  const when = Object.assign(document.createElement("time"), { dateTime: time, title: moment(time), textContent: ago(time) });
  const parts = [when, span("chip", kind)];
  let words = text(data.reason) || "planned";
  if (kind === "state") {
    const badge = span("badge", text(data.state));
    badge.dataset.state = text(data.state);
    parts.push(badge);
    words = text(data.reason);
  } else if (kind === "checkpoint") {
    words = `checkpoint of step ${number(data.step)} committed`;
  } else if (kind === "log") {
    const level = span("level", text(data.level));
    level.dataset.level = text(data.level);
    parts.push(level);
    words = text(data.message);
  }
  for (const part of [...parts, words, span("muted small-text", actor)]) item.append(part, " ");
  return item;
}

const text = (value) => (typeof value === "string" ? value : "");

function span(className, textContent) {
  return Object.assign(document.createElement("span"), { className, textContent });
}
