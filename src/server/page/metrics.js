// Metrics in Prometheus's text format, https://prometheus.io/docs/instrumenting/exposition_formats/.

/** Parses the metrics whose name starts with `prefix` into a map from the rest of the name to `[{ labels, value }]`. */
export function parseMetrics(text, prefix) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith(prefix) ? /^([a-zA-Z0-9_]+)(?:\{(.*)\})? (\S+)/.exec(line.slice(prefix.length)) : null;
    if (!match) continue;
    const [, name, labels = "", value] = match;
    if (!metrics.has(name)) metrics.set(name, []);
    metrics.get(name).push({ labels: parseLabels(labels), value: parseValue(value) });
  }
  return metrics;
}

function parseLabels(text) {
  const pairs = text.matchAll(/([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"/g);
  return Object.fromEntries(Array.from(pairs, ([, name, value]) => [name, value]));
}

function parseValue(text) {
  return text === "+Inf" ? Infinity : Number(text);
}

/** Returns the sum of a metric over all labels, or undefined if the server does not have it. */
export function total(metrics, name) {
  return metrics.get(name)?.reduce((sum, { value }) => sum + value, 0);
}

/** Returns a histogram as a map from the upper bound of each bucket to its cumulative count, in ascending order. */
export function histogram(metrics, name) {
  const buckets = new Map();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = parseValue(labels.le);
    buckets.set(bound, (buckets.get(bound) ?? 0) + value);
  }
  return new Map([...buckets].sort(([a], [b]) => a - b));
}

/** Returns the counts of `now` without those of `before`, an earlier state of the same histogram. */
export function difference(now, before) {
  return new Map([...now].map(([bound, count]) => [bound, count - (before.get(bound) ?? 0)]));
}

/**
 * Estimates a quantile, linearly inside of a bucket, as Prometheus does. Returns undefined for an empty histogram, and
 * the largest finite bound for a value above it.
 */
export function quantile(buckets, share) {
  const counts = [...buckets];
  const rank = share * (counts.at(-1)?.[1] ?? 0);
  if (rank === 0) return undefined;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= rank) return bound === Infinity ? lower : lower + ((bound - lower) * (rank - below)) / (count - below);
    lower = bound;
    below = count;
  }
  return undefined;
}
