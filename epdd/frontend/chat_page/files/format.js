// Numbers as people read them; the same rules as epdctl's.  What is missing is a dash.

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function number(value) {
  if (!known(value)) return "–";
  if (value < 0.005) return "0"; // rates decay, and never quite reach it
  return value >= 100 ? quantity(value) : String(Number(value.toPrecision(value < 10 ? 2 : 3)));
}

export function quantity(value) {
  if (!known(value)) return "–";
  if (value >= 1e6) return `${Number((value / 1e6).toFixed(1))}M`;
  return Math.round(value).toLocaleString("en");
}

export function seconds(value) {
  if (!known(value)) return "–";
  return value < 1 ? `${Math.round(1000 * value)} ms` : value < 10 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

export function duration(value) {
  if (!known(value)) return "–";
  const minutes = Math.floor(value / 60);
  const hours = Math.floor(minutes / 60);
  if (!minutes) return `${Math.floor(value)} s`;
  if (!hours) return `${minutes} min`;
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function size(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = value < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(value) / 10));
  return `${Number((value / 1024 ** power).toFixed(value / 1024 ** power < 100 ? 1 : 0))} ${units[power]}`;
}

export const percent = (share) => (known(share) ? `${Math.round(100 * share)}%` : "–");

export const count = (value, noun) =>
  `${quantity(value)} ${noun}${value === 1 ? "" : /ch$/.test(noun) ? "es" : "s"}`;
