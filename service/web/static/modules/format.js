// Numbers, times and sizes as text, as service/web/formats.py writes them.

const NOTHING = "–";

export function number(value) {
  if (value === null || value === undefined) return NOTHING;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  const magnitude = Math.abs(value);
  if (Number.isInteger(value) && magnitude < 1e15) return value.toLocaleString("en-US");
  if (magnitude !== 0 && (magnitude < 1e-3 || magnitude >= 1e7)) {
    return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return value.toLocaleString("en-US", magnitude < 1000 ? { maximumSignificantDigits: 4 } : { maximumFractionDigits: 0 });
}

export function percent(part, whole) {
  if (!whole) return "0%";
  return part >= whole ? "100%" : `${Math.min(99, Math.floor((100 * part) / whole))}%`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return NOTHING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < units.length - 1) [bytes, unit] = [bytes / 1024, unit + 1];
  const digits = unit && Math.abs(bytes) < 100 ? 1 : 0;
  return `${bytes.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${units[unit]}`;
}

// The two largest units: "3 min 20 s".
export function duration(seconds) {
  let left = Math.max(0, Math.round(seconds));
  const parts = [];
  for (const [name, unit] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const count = Math.floor(left / unit);
    left %= unit;
    if (count || (name === "s" && !parts.length)) parts.push(`${count} ${name}`);
    else if (parts.length) break;
  }
  return parts.slice(0, 2).join(" ");
}

export function ago(time, now = Date.now()) {
  if (!time) return NOTHING;
  const seconds = (now - Date.parse(time)) / 1000;
  return seconds < 10 ? "just now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

export function moment(time) {
  return time ? `${new Date(time).toISOString().slice(0, 19).replace("T", " ")} UTC` : NOTHING;
}

export function plural(count, noun, plural = `${noun}s`) {
  return `${number(count)} ${count === 1 ? noun : plural}`;
}
