// A change is asked about, made, and its outcome told.

import { change } from "./api.js";
import { confirmed, tell } from "./dialogs.js";

/** Makes a change if the operator confirms it; whether it was made. `button` is out of use meanwhile. */
export async function offer(button, { title, text, yes, path, done }) {
  if (!(await confirmed(title, text, yes))) return false;
  button.disabled = true;
  try {
    await change(path);
    tell(done, "good");
    return true;
  } catch (fault) {
    tell(fault.message, "bad");
    return false;
  } finally {
    button.disabled = false;
    // Not from somebody who has gone on to something else: a space would press the button.
    const idle = [document.body, button, null].includes(document.activeElement);
    if (button.isConnected && idle) button.focus({ preventScroll: true });
  }
}
