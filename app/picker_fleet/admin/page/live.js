// The event stream of the replica, and whether it is still alive.

const SILENT_MS = 3000; // snapshots come each second; after this long the figures are stale
const DEAD_MS = 12000; // a connection that is silent for this long is closed
const WAIT_MS = [1000, 2000, 4000, 8000];

export class Live {
  /** `on` has `snapshot(data)`, `decisions(data)`, `unavailable(data)` and `link(state, since)`: waiting, live or stale. */
  constructor(on) {
    this.on = on;
    this.lastSnapshot = null; // arrival of the last snapshot: a Date to show, performance time to measure
    this.failures = 0;
    this.connect();
    setInterval(() => this.check(), 500);
  }

  connect() {
    this.source?.close();
    this.lastEventMs = performance.now();
    const source = (this.source = new EventSource("api/v1/events"));
    source.addEventListener("snapshot", (event) => this.take(event, this.on.snapshot));
    source.addEventListener("decisions", (event) => this.take(event, this.on.decisions));
    source.addEventListener("unavailable", (event) => this.take(event, this.on.unavailable));
    source.addEventListener("error", () => {
      // The browser reconnects after a broken connection, but not after a refusal.
      if (source.readyState === EventSource.CLOSED) this.reconnectLater();
    });
  }

  take(event, handler) {
    this.lastEventMs = performance.now();
    if (event.type === "snapshot") {
      this.lastSnapshot = { ms: performance.now(), date: new Date() };
      this.failures = 0;
      this.on.link("live");
    }
    handler(JSON.parse(event.data));
  }

  reconnectLater() {
    clearTimeout(this.timer);
    const wait = WAIT_MS[Math.min(this.failures++, WAIT_MS.length - 1)];
    this.timer = setTimeout(() => this.connect(), wait);
  }

  check() {
    const now = performance.now();
    const since = this.lastSnapshot?.ms ?? -Infinity;
    if (now - since > SILENT_MS) this.on.link(this.lastSnapshot ? "stale" : "waiting", this.lastSnapshot?.date);
    if (now - this.lastEventMs > DEAD_MS && this.source.readyState !== EventSource.CLOSED) {
      this.source.close();
      this.reconnectLater();
    }
  }
}
