// The events of a job, live: resumed after the last event when the connection is cut.

const FIRST_RETRY_MS = 1_000;
const LONGEST_RETRY_MS = 20_000;
const KINDS = ["state", "plan", "metric", "checkpoint", "log"];

// Dispatches "event" ({ detail: { kind, ...event } }), "connection" ({ detail: "on" | "lost" | "ended" }), and "gone" if
// the service no longer keeps the events after the last one: whoever shows them must load them anew.
export class JobEvents extends EventTarget {
  #source = null;
  #timer = null;
  #retryMs = FIRST_RETRY_MS;
  #isOpen = false;

  constructor(jobId, { after = 0, kinds = KINDS, query = "" } = {}) {
    super();
    this.jobId = jobId;
    this.lastId = after;
    this.kinds = kinds;
    this.query = query; // further parameters of the stream, such as "&interval_s=1"
    this.connection = "off";
    addEventListener("online", () => this.#isOpen && this.connection === "lost" && this.#connect());
    addEventListener("pagehide", () => this.#disconnect());
    document.addEventListener("visibilitychange", () => this.#followVisibility());
    addEventListener("pageshow", (event) => event.persisted && this.#isOpen && this.#connect());
  }

  open() {
    this.#isOpen = true;
    this.#connect();
    return this;
  }

  close() {
    this.#isOpen = false;
    this.#disconnect();
  }

  // A hidden tab needs no stream, and browsers allow six connections to a service, for all tabs together.
  #followVisibility() {
    if (document.visibilityState === "hidden") this.#disconnect();
    else if (this.#isOpen && !this.#source && this.connection !== "ended") this.#connect();
  }

  #disconnect() {
    clearTimeout(this.#timer);
    this.#source?.close();
    this.#source = null;
  }

  // A new EventSource for each connection: its own retries give up after an HTTP error, and say nothing of the reason.
  #connect() {
    this.#disconnect();
    if (document.visibilityState === "hidden") return;
    const source = new EventSource(`/v1/jobs/${this.jobId}/events?last_event_id=${this.lastId}${this.query}`);
    this.#source = source;
    source.onopen = () => {
      this.#retryMs = FIRST_RETRY_MS;
      this.#show("on");
    };
    for (const kind of KINDS) source.addEventListener(kind, (message) => this.#take(kind, message));
    source.onerror = () => this.#retry();
  }

  #take(kind, message) {
    const event = JSON.parse(message.data);
    if (event.id <= this.lastId) return; // after a cut, nothing comes twice
    this.lastId = event.id;
    if (this.kinds.includes(kind)) this.dispatchEvent(new CustomEvent("event", { detail: event }));
  }

  async #retry() {
    this.#disconnect();
    const job = await this.#job();
    if (!this.#isOpen || this.#source) return;
    if (job?.is_over && job.last_event_id <= this.lastId) return this.#show("ended");
    if (job?.first_event_id > this.lastId + 1) {
      this.lastId = job.first_event_id - 1;
      this.dispatchEvent(new CustomEvent("gone"));
    }
    // A stream that ends while the service answers was only cut.
    if (!job) this.#show("lost");
    this.#timer = setTimeout(() => this.#connect(), this.#retryMs * (0.75 + Math.random() / 2));
    this.#retryMs = Math.min(2 * this.#retryMs, LONGEST_RETRY_MS);
  }

  async #job() {
    try {
      const response = await fetch(`/v1/jobs/${this.jobId}`, { headers: { accept: "application/json" } });
      if (response.status === 404 || response.status === 410) return { is_over: true, last_event_id: 0, first_event_id: 0 };
      if (response.status === 401) return location.reload(), null;
      if (!response.ok) return null;
      const job = await response.json();
      return { ...job, is_over: ["succeeded", "failed", "cancelled", "deleting"].includes(job.state) };
    } catch {
      return null;
    }
  }

  #show(connection) {
    if (connection === this.connection) return;
    this.connection = connection;
    this.dispatchEvent(new CustomEvent("connection", { detail: connection }));
  }
}

const WORDS = { on: "live", lost: "connection lost, trying again", ended: "ended", off: "" };

// Show the state of the connection in an element with the class `live`.
export function showConnection(events, element, announce = () => {}) {
  const show = () => {
    element.dataset.live = events.connection;
    element.textContent = WORDS[events.connection];
    element.hidden = events.connection === "off";
  };
  let wasLost = false;
  events.addEventListener("connection", () => {
    show();
    if (events.connection === "lost" || wasLost) announce(events.connection === "lost" ? WORDS.lost : "connected again");
    wasLost = events.connection === "lost";
  });
  show();
}
