// Calls of the admin API. A refusal is a Problem with the API's text (RFC 9457).

import { askToken } from "./dialogs.js";

const KEY = "picker-token";
const DEADLINE_MS = 8000;
const TOKEN = /^[\x21-\x7e]{1,512}$/; // characters valid in a header; a pasted token may have invisible ones

export class Problem extends Error {
  constructor(status, detail, code = "") {
    super(detail);
    this.status = status;
    this.code = code;
  }

  /** Whether the call may succeed with a token, or with another token. */
  get needsToken() {
    return this.status === 401 || this.code === "operator_needed";
  }
}

/** A GET under /api/v1; empty parameters are left out. */
export function read(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value));
  return withToken(() => call("GET", query.size ? `${path}?${query}` : path));
}

/**
 * A change under /api/v1: a POST, or the PATCH `patch`. If the API needs a token, asks the operator until the API
 * accepts the token or the operator cancels.
 */
export function change(path, patch) {
  declined = false;
  return withToken(() => call(patch ? "PATCH" : "POST", path, patch));
}

/** The answer to a GET under /api/v1, whose body the caller reads until `signal`. */
export function open(path, signal) {
  return withToken(() => ask("GET", path, signal));
}

let declined = false; // whether the operator cancelled the token dialog; then reads do not open it again
let question = null; // promise of the open token dialog

async function withToken(attempt) {
  for (;;) {
    const used = sessionStorage.getItem(KEY);
    try {
      return await attempt();
    } catch (fault) {
      if (!fault.needsToken || declined) throw fault;
      if (sessionStorage.getItem(KEY) !== used) continue;
      question ??= newToken(used !== null && fault.status === 401).finally(() => (question = null));
      if (await question) continue;
      declined = true;
      throw fault;
    }
  }
}

/** Asks the operator for a token and stores it. Returns whether the operator gave one. */
async function newToken(wrong) {
  let token = await askToken(wrong);
  while (token && !TOKEN.test(token)) token = await askToken(true);
  if (token) sessionStorage.setItem(KEY, token);
  return token !== "";
}

async function ask(method, path, signal, sent) {
  const token = sessionStorage.getItem(KEY);
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  let answer;
  try {
    answer = await fetch(`api/v1/${path}`, { method, headers, signal, body: sent && JSON.stringify(sent) });
  } catch (fault) {
    throw new Problem(0, fault.name === "TimeoutError" ? "The replica did not answer in time." : "The replica cannot be reached.");
  }
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => null);
  throw new Problem(answer.status, String(problem?.detail ?? `The API answered ${answer.status}.`), problem?.code);
}

async function call(method, path, sent) {
  const answer = await ask(method, path, AbortSignal.timeout(DEADLINE_MS), sent);
  try {
    return await answer.json();
  } catch {
    throw new Problem(answer.status, "The answer was not JSON.");
  }
}

export const part = encodeURIComponent;
