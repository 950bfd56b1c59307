// Formats figures as text. An unknown figure is a dash.

const NONE = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

/** Formats a number as 7, 7.2 or 12 400, with at most `digits` decimals. */
export function number(value, digits = 1) {
  if (!known(value)) return NONE;
  return value.toLocaleString("en", { maximumFractionDigits: digits }).replaceAll(",", "\u202f");
}

/** Formats a size as 900 B, 7.2 kB or 12 MB. */
export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; value >= 999.5 && at < units.length - 1; at++) value /= 1000;
  return `${number(value, value < 10 ? 1 : 0)} ${units[at]}`;
}

/** Formats a duration as 40 ms, 3.2 s, 2 m 05 s or 3 h 10 m. */
export function seconds(value) {
  if (!known(value)) return NONE;
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  const two = (part) => String(part).padStart(2, "0");
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} m`;
  return `${Math.floor(whole / 86400)} d`;
}

/** A share of 0 to 1 as a percentage. */
export function percent(value) {
  return known(value) ? `${number(value * 100, value < 0.0995 ? 1 : 0)} %` : NONE;
}

/** Wall-clock time of seconds since the epoch. */
export const clock = (at) => (known(at) ? new Date(at * 1000).toLocaleTimeString("en-GB") : NONE);

export const plural = (count, one, many = `${one}s`) => `${number(count, 0)} ${count === 1 ? one : many}`;
