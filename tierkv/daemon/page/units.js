// Numbers as people read them. What is shown beside them exactly stands in the tables.

const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  let place = 0;
  while (value >= 1024 && place < SIZES.length - 1) { value /= 1024; place += 1; }
  return `${place ? value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) : Math.round(value)} ${SIZES[place]}`;
}

export const exact = (value) => (value === null || value === undefined ? "–" : value.toLocaleString("en-US"));

export function count(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return `${(value / (size === 1e4 ? 1e3 : size)).toFixed(1)}${letter}`;
  }
  return value >= 100 || Number.isInteger(value) ? exact(Math.round(value)) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${Math.floor(value / 86400)} d`;
}

export const percent = (share) => (share === null || !Number.isFinite(share) ? "–" : `${(share * 100).toFixed(1)} %`);

export const short = (digest) => digest.slice(0, 12);
