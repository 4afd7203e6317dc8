// Number formats, the same as in p2ptrain/status/formats.py.

function scaled(number, units, last, gap) {
  for (const unit of units) {
    if (number < 999.5) return `${number.toFixed(unit === units[0] || number >= 99.95 ? 0 : 1)}${unit && gap}${unit}`;
    number /= 1000;
  }
  return `${number.toFixed(1)}${gap}${last}`;
}

export const bytes = (number) => scaled(number, ["B", "kB", "MB", "GB"], "TB", " ");
export const count = (number) => scaled(number, ["", "k", "M", "B"], "T", "");

export function duration(seconds) {
  if (seconds < 90) return `${seconds.toFixed(seconds < 9.95 ? 1 : 0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 48 * 3600 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} days`;
}

// Finer than `duration`: 3.4 ms, 34 ms, 0.34 s.
export function latency(seconds) {
  if (seconds < 0.00005) return "0 s";
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  return seconds < 0.995 ? `${seconds.toFixed(2)} s` : duration(seconds);
}

// The mean with its 95 % confidence interval, from the standard error.
export const interval = (error) => (error === null ? "" : `± ${(1.96 * error).toFixed(3)}`);

export function evaluation({ metric, mean, error }) {
  return `${metric} ${mean.toFixed(3)} ${interval(error)}`.trim();
}

export const privacy = ({ epsilon, limit, delta }) => `ε ${(Math.ceil(100 * epsilon) / 100).toFixed(2)} of ${limit}, δ ${delta}`;

export const orDash = (value, format) => (value === null || value === undefined ? "–" : format(value));
export const ago = (now, at) => `${duration(Math.max(0, now - at))} ago`;
export const iso = (at) => new Date(at * 1000).toISOString();
export const utc = (at) => `${iso(at).slice(0, 19).replace("T", " ")} UTC`;
export const shortId = (peer) => (peer.length > 10 ? `…${peer.slice(-8)}` : peer);
export const plural = (number, one, many) => `${number} ${number === 1 ? one : many}`;
