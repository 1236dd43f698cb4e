// The cluster's page: the same page again every few seconds, of which only the content is taken.

import { announce, freshPage, replaceContent } from "./page.js";

const INTERVAL_MS = 5_000;
const content = document.getElementById("cluster");
const live = document.getElementById("live");

async function refresh() {
  if (document.visibilityState === "visible") {
    try {
      const page = await freshPage();
      replaceContent(content, page.getElementById("cluster"));
      showLive("on", "up to date again");
    } catch {
      showLive("lost", "connection lost, trying again");
    }
  }
  setTimeout(refresh, INTERVAL_MS);
}

function showLive(state, words) {
  if (state === live.dataset.live || (state === "on" && live.dataset.live === "off")) return;
  live.dataset.live = state;
  live.textContent = words;
  live.hidden = false;
  announce(words);
}

setTimeout(refresh, INTERVAL_MS);
