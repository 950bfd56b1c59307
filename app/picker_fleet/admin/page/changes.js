// Makes changes after the operator confirms them, and shows the outcome.

import { change } from "./api.js";
import { confirmed, showOutcome } from "./dialogs.js";

/** Makes a change if the operator confirms it; returns whether it was made. `button` is disabled meanwhile. */
export async function offer(button, { title, text, yes, path, done }) {
  if (!(await confirmed(title, text, yes))) return false;
  button.disabled = true;
  try {
    await change(path);
    showOutcome(done, "good");
    return true;
  } catch (fault) {
    showOutcome(fault.message, "bad");
    return false;
  } finally {
    button.disabled = false;
    // Return the focus to the button unless the operator has moved it: a space would press the button.
    const idle = [document.body, button, null].includes(document.activeElement);
    if (button.isConnected && idle) button.focus({ preventScroll: true });
  }
}
