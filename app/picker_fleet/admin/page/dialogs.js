// Dialogs that ask the operator, and messages with the outcome of a change.

import { byId, setLevel, setText } from "./dom.js";

const TOAST_MS = 7000;
let hideTimer = 0;

/**
 * Returns whether the operator confirms; Escape and Cancel decline. With `number`, the dialog also asks for a whole
 * number, which begins as `number`, and returns that number.
 */
export async function confirmed(title, text, yes, number) {
  const field = byId("confirm-number");
  byId("confirm-field").hidden = field.disabled = number === undefined;
  field.value = number ?? "";
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), text);
  setText(byId("confirm-yes"), yes);
  const answer = (await answered(byId("confirm"))) === "yes";
  return answer && number !== undefined ? field.valueAsNumber : answer;
}

/** Asks for a token. Returns "" if the operator gives none. */
export async function askToken(wrong) {
  setText(byId("token-title"), wrong ? "That token was not right" : "This fleet asks for a token");
  const field = byId("token");
  field.value = "";
  const answer = answered(byId("ask-token"));
  field.focus();
  const token = (await answer) === "yes" ? field.value.trim() : "";
  field.value = "";
  return token;
}

// Enter in a field confirms; the form's first button is Cancel.
for (const [field, yes] of [["token", "token-yes"], ["confirm-number", "confirm-yes"]]) {
  byId(field).addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    byId(yes).click();
  });
}

/** Shows the outcome of a change; `wanted` is "good" or "bad". */
export function showOutcome(text, wanted) {
  const toast = byId("toast");
  setText(toast, text);
  setLevel(toast, wanted);
  toast.hidden = false;
  clearTimeout(hideTimer);
  hideTimer = setTimeout(() => (toast.hidden = true), TOAST_MS);
}

// A dialog's close event comes after the dialog has closed. A question asked in between must not get the answer
// to the previous question: resolve the previous one first, with its own answer, or with "" if its dialog is open.
const pending = new Map();

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("close", () => {
    if (!dialog.open) pending.get(dialog)?.(dialog.returnValue);
  });
}

function answered(dialog) {
  pending.get(dialog)?.(dialog.open ? "" : dialog.returnValue);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => pending.set(dialog, resolve));
}
