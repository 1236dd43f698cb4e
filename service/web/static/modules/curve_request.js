// Curves of a job by name, in as many requests as the API's limit of names takes.

import { get } from "./api.js";

const MAX_NAMES = 100;

// { curves, last_event_id }, the id of the first request: what came since is repeated by the stream.
export async function getCurves(path, names, options) {
  const requests = [];
  for (let first = 0; first < Math.max(1, names.length); first += MAX_NAMES) {
    requests.push(get(path, { ...options, name: names.slice(first, first + MAX_NAMES) }));
  }
  const answers = await Promise.all(requests);
  const curves = Object.assign({}, ...answers.map((answer) => answer.curves));
  return { curves, last_event_id: Math.min(...answers.map((answer) => answer.last_event_id)) };
}
