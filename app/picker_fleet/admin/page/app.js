// The dashboard: one replica's admin API, shown.

import { offer } from "./changes.js";
import { startDecisions, takeDecisions } from "./decisions.js";
import { byId, say } from "./dom.js";
import { plural } from "./format.js";
import { Live } from "./live.js";
import { lookUp, startLookup } from "./lookup.js";
import { remember, showOverview, showTrouble } from "./overview.js";
import { startQueue } from "./queue.js";
import { showTables } from "./tables.js";
import { startTheme } from "./theme.js";

let latest = null;
let asked = false;

startTheme();
startLookup();
startQueue(lookUp);
startDecisions();

/** At most one drawing a frame, and none while nobody looks. */
function draw() {
  if (asked || !latest) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const { at, state } = latest;
    byId("main").dataset.at = at; // which snapshot is on the page
    say(byId("pool"), state.pool);
    say(byId("replica"), state.replica);
    document.title = `${state.queued} waiting · ${state.pool} · Picker Fleet`;
    const pause = byId("pause");
    if (pause.dataset.paused === undefined) pause.disabled = false;
    pause.dataset.paused = String(state.paused);
    say(pause, state.paused ? "Resume dispatch" : "Pause dispatch");
    pause.classList.toggle("strong", state.paused);
    showOverview(latest);
    showTables(latest);
  });
}

byId("pause").addEventListener("click", () => {
  const { paused, queued } = latest.state;
  offer(byId("pause"), {
    title: paused ? "Resume dispatch?" : "Pause dispatch for the whole fleet?",
    text: paused
      ? `${plural(queued, "request")} will be served again, within the bounds.`
      : "Every replica stops sending requests to endpoints: arrivals wait, until their deadline, or are refused. What runs goes on.",
    yes: paused ? "Resume" : "Pause",
    path: paused ? "resume" : "pause",
    done: paused ? "The fleet dispatches again." : "The fleet has stopped dispatching.",
  });
});

new Live({
  snapshot(shot) {
    latest = shot;
    remember(shot);
    draw();
  },
  decisions: takeDecisions,
  unavailable: ({ detail }) => showTrouble(detail),
  link(state, since) {
    const pill = byId("connection");
    if (pill.dataset.state !== state) pill.dataset.state = state;
    say(pill, state === "live" ? "live" : state === "stale" ? `stale since ${since.toLocaleTimeString("en-GB")}` : "connecting");
  },
});
