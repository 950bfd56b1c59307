// Makes changes after the operator confirms them, and shows the outcome.

import { change, read } from "./api.js";
import { confirmed, showOutcome } from "./dialogs.js";

/**
 * Makes a change if the operator confirms it; returns whether it was made. `button` is disabled meanwhile. The change
 * is a POST to `path`, or the function `make`, which gets the number that the dialog asks for if `number` is set.
 */
export async function offer(button, { title, text, yes, path, done, number, make = () => change(path) }) {
  const answer = await confirmed(title, text, yes, number);
  if (!answer) return false;
  button.disabled = true;
  try {
    await make(answer);
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

/** Pins the endpoint's limit, or unpins the endpoint if `limit` is null. The API replaces all pinned limits at once. */
export async function pin(address, limit) {
  const { config } = await read("config");
  const { [address]: _, ...others } = config.request_queue_controller.pinned;
  const pinned = limit === null ? others : { ...others, [address]: limit };
  return change("config", { request_queue_controller: { pinned } });
}
