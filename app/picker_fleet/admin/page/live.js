// Reads the replica's event stream, detects when it stops, and reconnects.

import { open } from "./api.js";

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

  async connect() {
    this.reading?.abort();
    const reading = (this.reading = new AbortController());
    this.lastEventMs = performance.now();
    try {
      const { body } = await open("events", reading.signal);
      const reader = body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) this.take(event);
      }
    } catch {
      // The call was refused, or the stream broke: reconnect below.
    }
    if (this.reading === reading) this.reconnectLater();
  }

  /** One event: lines `event: NAME` and `data: JSON`. */
  take(event) {
    const fields = Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s)));
    const handler = this.on[fields.event];
    if (!handler) return;
    this.lastEventMs = performance.now();
    if (fields.event === "snapshot") {
      this.lastSnapshot = { ms: performance.now(), date: new Date() };
      this.failures = 0;
      this.on.link("live");
    }
    try {
      handler(JSON.parse(fields.data));
    } catch (fault) {
      reportError(fault); // a fault of the page, not of the connection
    }
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
    if (now - this.lastEventMs > DEAD_MS) {
      this.reading.abort(); // `connect` then schedules a reconnect
      this.lastEventMs = now;
    }
  }
}
