// Log lines of a job by text, level and writer: the newest, older ones on request, new ones while following.

import { get } from "./api.js";
import { number, plural } from "./format.js";

const PAGE_LINES = 200;
const MAX_LINES = 5_000; // in the page; the oldest are dropped
const MAX_CHARACTERS = 4_000; // of a line in the page
const FOLLOW_MS = 2_000;
const SEARCH_MS = 40_000; // after which a search that has found nothing goes on only on request
const LINE = /^(\d{4}-\d\d-\d\dT[\d:.]+Z) ([a-z]+) +(.*)$/s;

export function startLogs(jobId, root) {
  const [form, frame, note] = ["log-form", "log-lines", "log-note"].map((id) => document.getElementById(id));
  const follow = document.getElementById("log-follow");
  const live = document.getElementById("log-live");
  const path = `/v1/jobs/${jobId}/logs/lines`;
  let older = null; // cursor of older lines
  let newest = new Map(); // writer: position of its newest line
  let request = 0;
  let chosen = {}; // filters of the lines in the page
  let search = null; // the running search for older lines
  let timer = null;

  const button = Object.assign(document.createElement("button"), { type: "button", className: "button small" });
  button.addEventListener("click", () => (search ? showSearch(null) : loadOlder()));

  const isFiltered = () => Object.values(chosen).some(Boolean);
  const query = () => Object.fromEntries(new FormData(form));
  const isAtEnd = () => frame.scrollHeight - frame.scrollTop - frame.clientHeight < 40;

  async function load() {
    const own = (request += 1);
    chosen = query();
    showSearch(null);
    note.textContent = "Searching …";
    try {
      const page = await get(path, { ...chosen, limit: PAGE_LINES });
      if (own !== request) return;
      showWriters(page.writers);
      older = page.next_cursor;
      newest = new Map();
      frame.replaceChildren(button, ...lines(page.items));
      showState(page);
      frame.scrollTop = frame.scrollHeight;
      if (older && !page.items.length) await loadOlder();
    } catch (error) {
      note.textContent = error.message;
    }
  }

  // Reads on until there are lines: the API reads a part of the log for each page, in which there may be none.
  async function loadOlder() {
    const own = { until: Date.now() + SEARCH_MS };
    showSearch(own);
    try {
      let page;
      do {
        page = await get(path, { ...chosen, limit: PAGE_LINES, cursor: older });
        if (search !== own) return;
        const height = frame.scrollHeight;
        older = page.next_cursor;
        button.after(...lines(page.items));
        frame.scrollTop += frame.scrollHeight - height;
        showState(page);
      } while (older && !page.items.length && Date.now() < own.until);
    } catch (error) {
      if (search === own) note.textContent = error.message;
    } finally {
      if (search === own) showSearch(null);
    }
  }

  function showSearch(running) {
    search = running;
    button.textContent = search ? "Stop searching" : isFiltered() ? "Search further back" : "Show older lines";
  }

  // Newest first, as the API sends them; in the page, the oldest is first.
  function lines(items) {
    for (const item of items) {
      const key = `${item.attempt} ${item.worker}`;
      if (isLater(item.position, newest.get(key))) newest.set(key, item.position);
    }
    return items.toReversed().map((item) => line(item, chosen.grep));
  }

  function showState(page) {
    const count = frame.querySelectorAll(".log-line").length;
    const back = page.searched_to && older ? ` Searched back to ${page.searched_to.slice(0, 19).replace("T", " ")} UTC.` : "";
    note.textContent = count
      ? `${plural(count, "line")}.${back}`
      : older ? `No line matches yet.${back}` : isFiltered() ? "No line matches." : "There are no log lines yet.";
    frame.hidden = !count && !older;
    button.hidden = !older;
  }

  function showWriters(writers) {
    const select = form.elements.worker;
    const known = new Set([...select.options].map((option) => option.value));
    for (const writer of writers) {
      if (!known.has(writer)) select.append(Object.assign(document.createElement("option"), { value: writer, textContent: writer }));
    }
  }

  async function poll() {
    clearTimeout(timer);
    if (document.visibilityState === "visible") {
      const own = request;
      try {
        const page = await get(path, { ...chosen, limit: 500 });
        if (own === request) {
          const fresh = page.items.filter((item) => isLater(item.position, newest.get(`${item.attempt} ${item.worker}`)));
          const stays = !isAtEnd();
          if (fresh.length === page.items.length && page.next_cursor && fresh.length) await load();
          else if (fresh.length) {
            frame.hidden = false;
            frame.append(...lines(fresh));
            const all = frame.querySelectorAll(".log-line");
            for (let index = 0; index < all.length - MAX_LINES; index += 1) all[index].remove();
            note.textContent = `${plural(Math.min(all.length, MAX_LINES), "line")}.`;
            if (!stays) frame.scrollTop = frame.scrollHeight;
          }
        }
        showLive("on", "following");
      } catch {
        showLive("lost", "connection lost, trying again");
      }
    }
    if (root.dataset.over === "yes") return stop("ended");
    if (follow.getAttribute("aria-pressed") === "true") timer = setTimeout(poll, FOLLOW_MS);
  }

  function showLive(state, words) {
    live.dataset.live = state;
    live.textContent = words;
    live.hidden = false;
  }

  function stop(words) {
    clearTimeout(timer);
    follow.setAttribute("aria-pressed", "false");
    live.hidden = !words;
    live.dataset.live = "ended";
    live.textContent = words;
  }

  follow?.addEventListener("click", async () => {
    if (follow.getAttribute("aria-pressed") === "true") return stop("");
    follow.setAttribute("aria-pressed", "true");
    if (!newest.size) await load();
    poll();
  });
  form.addEventListener("submit", (event) => (event.preventDefault(), load()));
  form.addEventListener("change", ({ target }) => target.tagName === "SELECT" && load());
  const observer = new IntersectionObserver(([entry]) => entry.isIntersecting && (observer.disconnect(), load()), { rootMargin: "200px" });
  observer.observe(form);
}

function isLater(position, other) {
  return !other || position[0] > other[0] || (position[0] === other[0] && position[1] > other[1]);
}

function line({ message, worker, attempt, level }, search) {
  const element = Object.assign(document.createElement("div"), { className: "log-line" });
  const match = LINE.exec(message);
  if (match) element.append(span("log-time", `${match[1].slice(0, 19).replace("T", " ")} `));
  element.append(span("log-writer", `a${attempt}.${worker} `));
  if (match) {
    const word = span("level", `${match[2]} `);
    if (level) word.dataset.level = level;
    element.append(word);
  }
  element.append(...shortened(match ? match[3] : message, search));
  return element;
}

// Text with what was searched for marked; of a long one, the part around the first match, or the beginning.
function shortened(text, search) {
  if (text.length <= MAX_CHARACTERS) return marked(text, search);
  const match = search ? text.indexOf(search) : 0;
  const begin = Math.max(0, Math.min(match - MAX_CHARACTERS / 2, text.length - MAX_CHARACTERS));
  const part = text.slice(begin, begin + MAX_CHARACTERS);
  const note = span("muted", ` (${number(MAX_CHARACTERS)} of ${number(text.length)} characters)`);
  return [begin ? "… " : "", ...marked(part, search), begin + MAX_CHARACTERS < text.length ? " …" : "", note];
}

// Text with what was searched for marked.
function marked(text, search) {
  if (!search || !text.includes(search)) return [text];
  return text.split(search).flatMap((part, index) =>
    index ? [Object.assign(document.createElement("mark"), { textContent: search }), part] : [part],
  );
}

function span(className, textContent) {
  return Object.assign(document.createElement("span"), { className, textContent });
}
