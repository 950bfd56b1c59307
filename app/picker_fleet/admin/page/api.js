// Calls of the admin API. A refusal is a Problem with the API's text (RFC 9457).

import { askToken } from "./dialogs.js";

const KEY = "picker-token";
const DEADLINE_MS = 8000;
const TOKEN = /^[\x21-\x7e]{1,512}$/; // what a header may contain; a pasted token may have invisible characters

export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/** A GET under /api/v1; empty parameters are left out. */
export function read(path, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value));
  return call("GET", query.size ? `${path}?${query}` : path);
}

/** A POST under /api/v1. Asks for the token if the API needs it, until it is right or the operator cancels. */
export async function change(path) {
  for (let wrong = false; ; wrong = true) {
    try {
      return await call("POST", path);
    } catch (fault) {
      if (fault.status !== 401) throw fault;
      let token = await askToken(wrong && sessionStorage.getItem(KEY) !== null);
      while (token && !TOKEN.test(token)) token = await askToken(true);
      if (!token) throw fault;
      sessionStorage.setItem(KEY, token);
    }
  }
}

async function call(method, path) {
  const token = method === "GET" ? null : sessionStorage.getItem(KEY);
  let answer;
  try {
    answer = await fetch(`api/v1/${path}`, {
      method,
      headers: token ? { authorization: `Bearer ${token}` } : {},
      signal: AbortSignal.timeout(DEADLINE_MS),
    });
  } catch (fault) {
    throw new Problem(0, fault.name === "TimeoutError" ? "The replica did not answer in time." : "The replica cannot be reached.");
  }
  let body = null;
  try {
    body = await answer.json();
  } catch {
    if (answer.ok) throw new Problem(answer.status, "The answer was not JSON.");
  }
  if (!answer.ok) throw new Problem(answer.status, String(body?.detail ?? `The API answered ${answer.status}.`));
  return body;
}

export const part = encodeURIComponent;
