// Questions to the operator, and news for them.

import { byId, level, say } from "./dom.js";

const TOAST_MS = 7000;
let gone = 0;

/** Whether the operator wants it. Escape and Cancel are no. */
export async function confirmed(title, text, yes) {
  say(byId("confirm-title"), title);
  say(byId("confirm-text"), text);
  say(byId("confirm-yes"), yes);
  return (await answered(byId("confirm"))) === "yes";
}

/** The token, or "" if it is not given. */
export async function askToken(wrong) {
  say(byId("token-title"), wrong ? "That token was not right" : "This fleet asks for its token");
  const field = byId("token");
  field.value = "";
  const answer = answered(byId("ask-token"));
  field.focus();
  const token = (await answer) === "yes" ? field.value.trim() : "";
  field.value = "";
  return token;
}

// Enter in the field means the token, not the form's first button.
byId("token").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  byId("token-yes").click();
});

/** Tells the outcome of a change; `wanted` is "good" or "bad". */
export function tell(text, wanted) {
  const toast = byId("toast");
  say(toast, text);
  level(toast, wanted);
  toast.hidden = false;
  clearTimeout(gone);
  gone = setTimeout(() => (toast.hidden = true), TOAST_MS);
}

// A dialog tells that it was closed a moment later. Who asks again within that moment must not hear of the
// question before: that one has the answer it was closed with, or no where it is still open.
const asked = new Map();

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("close", () => {
    if (!dialog.open) asked.get(dialog)?.(dialog.returnValue);
  });
}

function answered(dialog) {
  asked.get(dialog)?.(dialog.open ? "" : dialog.returnValue);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => asked.set(dialog, resolve));
}
