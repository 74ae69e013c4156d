// Attention on small matrices. Matrices are arrays of rows; all numbers are float64, as in regard.core.reference.

export const sum = (values) => values.reduce((total, x) => total + x, 0);
export const dot = (a, b) => a.reduce((total, x, c) => total + x * b[c], 0);
export const add = (a, b) => a.map((x, c) => x + b[c]);
export const scale = (a, factor) => a.map((x) => x * factor);
export const norm = (a) => Math.hypot(...a);
export const transpose = (rows) => (rows.length ? rows[0].map((_, c) => rows.map((row) => row[c])) : []);

// Softmax of beta * scores over the visible entries. A row that sees nothing gives zeros, as in regard.attend.
// beta = 0 is the mean of what is visible; beta = Infinity is hard attention, where ties share.
export function softmax(scores, beta = 1, visible = null) {
  const seen = scores.map((score, j) => (visible === null || visible[j]) && score !== -Infinity);
  if (!seen.some(Boolean)) return scores.map(() => 0);
  if (scores.some((score, j) => seen[j] && (Number.isNaN(score) || score === Infinity))) {
    return scores.map((_, j) => (seen[j] ? NaN : 0));
  }
  const largest = Math.max(...scores.filter((_, j) => seen[j]).map((score) => Math.sign(beta) * score));
  const parts = scores.map((score, j) => {
    if (!seen[j]) return 0;
    if (Math.abs(beta) === Infinity) return Math.sign(beta) * score === largest ? 1 : 0;
    return Math.exp(Math.abs(beta) * (Math.sign(beta) * score - largest));
  });
  const total = sum(parts);
  return parts.map((part) => part / total);
}

// Attention of one head. q is (i, c), k is (j, c), v is (j, e); bias and visible are (i, j) or null.
export function attend(q, k, v, { beta, visible = null, bias = null }) {
  const products = q.map((query) => k.map((key) => dot(query, key)));
  // beta scales the dot products; a score term is added after it
  const weights = products.map((row, i) => {
    const terms = bias === null ? null : bias[i];
    if (terms === null) return softmax(row, beta, visible === null ? null : visible[i]);
    if (beta === Infinity) return softmax(row, Infinity, visible === null ? null : visible[i]);
    return softmax(row.map((score, j) => beta * score + terms[j]), 1, visible === null ? null : visible[i]);
  });
  const width = v.length ? v[0].length : 0;
  const output = weights.map((row) => Array.from({ length: width }, (_, e) => row.reduce((sum, weight, j) => sum + weight * v[j][e], 0)));
  return { products, weights, output };
}

export const entropy = (weights) => -weights.reduce((sum, weight) => sum + (weight > 0 ? weight * Math.log(weight) : 0), 0);

// First-order change of the output c = sum_j a_j v_j when score j changes by change[j]:
// dc = beta * sum_j a_j * change[j] * (v_j - c).
export function firstOrderChange(weights, values, output, beta, change) {
  return output.map((c, e) => beta * weights.reduce((sum, weight, j) => sum + weight * change[j] * (values[j][e] - c), 0));
}

// Sinusoidal positions, Vaswani et al. 2017: sine in even columns, cosine in odd ones.
export function sinusoidal(length, width, base = 10000) {
  return Array.from({ length }, (_, n) => Array.from({ length: width }, (_, c) => {
    const angle = n / base ** ((c - (c % 2)) / width);
    return c % 2 ? Math.cos(angle) : Math.sin(angle);
  }));
}

// Rotary positions, Su et al. 2021, with halves paired: components c and c + width / 2 turn together.
export function rotary(rows, positions, base = 10000) {
  const half = rows.length ? rows[0].length / 2 : 0;
  return rows.map((row, n) => {
    const turned = row.slice();
    for (let c = 0; c < half; c += 1) {
      const angle = positions[n] / base ** (c / half);
      turned[c] = row[c] * Math.cos(angle) - row[c + half] * Math.sin(angle);
      turned[c + half] = row[c + half] * Math.cos(angle) + row[c] * Math.sin(angle);
    }
    return turned;
  });
}

// ALiBi, Press et al. 2022: minus slope times distance. The slopes of a power of two of heads are 2 ** (-8 * (h + 1) / heads);
// otherwise those of the next lower power, then every second one of the doubled number of heads.
export function alibiSlopes(heads) {
  const lower = 2 ** Math.floor(Math.log2(heads));
  const slopes = Array.from({ length: lower }, (_, h) => 2 ** (-8 * (h + 1) / lower));
  for (let h = 0; slopes.length < heads; h += 2) slopes.push(2 ** (-8 * (h + 1) / (2 * lower)));
  return slopes;
}

export function alibiBias(queries, keys, slope) {
  return queries.map((i) => keys.map((j) => -slope * Math.abs(i - j)));
}

// T5's bucket of the distance j - i, Raffel et al. 2020: exact up to half of the buckets, logarithmic up to `reach`.
// The borders are integers, so that no logarithm is rounded at a border.
export function t5Bucket(distance, buckets = 32, reach = 128) {
  const side = buckets / 2;
  const near = Math.floor(side / 2);
  const far = side - near;
  const size = Math.abs(distance);
  let bucket = Math.min(size, near);
  for (let step = 1; step < far && size >= near; step += 1) {
    if (size >= Math.ceil(near * (reach / near) ** (step / far) - 1e-9)) bucket += 1;
  }
  return (distance > 0 ? side : 0) + bucket;
}

// A seeded generator (mulberry32): the same address gives the same picture.
export function generator(seed) {
  let state = seed >>> 0;
  const uniform = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
  const normal = () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  return { uniform, normal };
}

// The convex hull of points in the plane, counter-clockwise (Andrew's monotone chain).
export function convexHull(points) {
  const sorted = points.map((point) => point.slice()).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  if (sorted.length < 3) return sorted;
  const turn = (o, a, b) => (a[0] - o[0]) * (b[1] - o[1]) - (a[1] - o[1]) * (b[0] - o[0]);
  const chain = (list) => {
    const found = [];
    for (const point of list) {
      while (found.length > 1 && turn(found[found.length - 2], found[found.length - 1], point) <= 0) found.pop();
      found.push(point);
    }
    found.pop();
    return found;
  };
  return [...chain(sorted), ...chain(sorted.slice().reverse())];
}
