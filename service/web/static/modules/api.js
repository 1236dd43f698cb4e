// Calls of the public API. Every failure is an ApiError whose message is words for people.

export class ApiError extends Error {
  constructor(status, problem) {
    super(words(status, problem));
    this.status = status;
    this.problem = problem;
    this.errors = problem.errors ?? [];
  }
}

function words(status, problem) {
  if (status === 0) return "The service does not respond. Check that it runs and that you are connected.";
  return problem.detail || problem.title || `The service answered with status ${status}.`;
}

// JSON of a response; null if it has none. `body` is sent as JSON.
export async function call(method, path, { body, signal, headers = {} } = {}) {
  const options = { method, signal, headers: { accept: "application/json", ...headers }, credentials: "same-origin" };
  if (body !== undefined) {
    options.headers["content-type"] ??= "application/json";
    options.body = typeof body === "string" ? body : JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, {});
  }
  const text = await response.text();
  let content = null;
  try {
    content = text ? JSON.parse(text) : null;
  } catch {
    content = { detail: `The service answered with status ${response.status}, without JSON.` };
  }
  if (response.ok) return content;
  leadToLogin(response);
  throw new ApiError(response.status, content ?? {});
}

// The login, once the session has ended. It leads back to this page.
let isLeaving = false;
onpageshow = () => (isLeaving = false);

export function leadToLogin({ status }) {
  if (status !== 401 || isLeaving || location.pathname.startsWith("/login")) return;
  isLeaving = true;
  location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
}

export const get = (path, parameters = {}, options = {}) => call("GET", withParameters(path, parameters), options);
export const post = (path, body, options = {}) => call("POST", path, { body, ...options });
export const remove = (path, options = {}) => call("DELETE", path, options);

// Path with a query; null and "" are left out, arrays repeat.
export function withParameters(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const item of Array.isArray(value) ? value : [value]) {
      if (item !== null && item !== undefined && item !== "") query.append(name, item);
    }
  }
  return query.size ? `${path}?${query}` : path;
}
