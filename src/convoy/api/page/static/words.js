// Numbers and times as people read them.

export function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export function seconds(value) {
  if (value == null) return "unknown";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toPrecision(3)} ms`;
  return `${value.toFixed(1)} s`;
}

export function age(unix) {
  const gone = Math.max(0, Date.now() / 1000 - unix);
  if (gone < 90) return `${Math.round(gone)} s`;
  if (gone < 5400) return `${Math.round(gone / 60)} min`;
  return gone < 172800 ? `${Math.round(gone / 3600)} h` : `${Math.round(gone / 86400)} days`;
}

export const perSecond = (rate) => `${rate >= 100 ? Math.round(rate).toLocaleString("en") : rate.toPrecision(2)} tokens/s`;
export const LEVELS = { none: "no evidence", self_signed: "self-signed evidence", hardware: "hardware evidence" };
export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
export const pairs = (hex) => hex.slice(0, 16).match(/.{4}/g)?.join(" ") ?? "";
