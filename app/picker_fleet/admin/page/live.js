// The fleet as it is told every second, and whether it still is.

const SILENT_MS = 3000; // a snapshot comes each second: past this the figures are stale
const DEAD_MS = 12000; // a connection that says nothing for so long is given up
const WAIT_MS = [1000, 2000, 4000, 8000];

export class Live {
  /** `on` has `snapshot(data)`, `decisions(data)`, `unavailable(data)` and `link(state, since)`: waiting, live or stale. */
  constructor(on) {
    this.on = on;
    this.heard = null; // when the last snapshot came: Date for people, performance time for counting
    this.failures = 0;
    this.connect();
    setInterval(() => this.look(), 500);
  }

  connect() {
    this.source?.close();
    this.spoke = performance.now();
    const source = (this.source = new EventSource("api/v1/events"));
    source.addEventListener("snapshot", (event) => this.take(event, this.on.snapshot));
    source.addEventListener("decisions", (event) => this.take(event, this.on.decisions));
    source.addEventListener("unavailable", (event) => this.take(event, this.on.unavailable));
    source.addEventListener("error", () => {
      // The browser itself comes back after a broken connection, but not after a refusal.
      if (source.readyState === EventSource.CLOSED) this.again();
    });
  }

  take(event, handler) {
    this.spoke = performance.now();
    if (event.type === "snapshot") {
      this.heard = { ms: performance.now(), date: new Date() };
      this.failures = 0;
      this.on.link("live");
    }
    handler(JSON.parse(event.data));
  }

  again() {
    clearTimeout(this.timer);
    const wait = WAIT_MS[Math.min(this.failures++, WAIT_MS.length - 1)];
    this.timer = setTimeout(() => this.connect(), wait);
  }

  look() {
    const now = performance.now();
    const since = this.heard?.ms ?? -Infinity;
    if (now - since > SILENT_MS) this.on.link(this.heard ? "stale" : "waiting", this.heard?.date);
    if (now - this.spoke > DEAD_MS && this.source.readyState !== EventSource.CLOSED) {
      this.source.close();
      this.again();
    }
  }
}
