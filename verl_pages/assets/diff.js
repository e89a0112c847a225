// Differences of two texts, by words: Myers' shortest edit script, within a limit.
const MAX_EDITS = 600;

// Words, spaces and single signs; numbers are one digit at a time, because one digit can decide.
const wordsOf = (text) => text.match(/\p{L}[\p{L}\p{M}]*|\s+|[^\p{L}\s]/gu) || [];

// For both texts the ranges [from, to) that the other lacks, in characters; null if they differ too much to say.
function differences(before, after) {
  const a = wordsOf(before);
  const b = wordsOf(after);
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const kept = commonWords(a.slice(start, a.length - end), b.slice(start, b.length - end));
  if (!kept) return null;
  const whole = (words, own) => {
    const common = new Set(own.map((i) => i + start));
    return ranges(words, (i) => i < start || i >= words.length - end || common.has(i));
  };
  return [whole(a, kept.map(([i]) => i)), whole(b, kept.map(([, j]) => j))];
}

function ranges(words, isCommon) {
  const found = [];
  let at = 0;
  words.forEach((word, i) => {
    if (!isCommon(i)) {
      const last = found[found.length - 1];
      if (last && last[1] === at) last[1] += word.length;
      else found.push([at, at + word.length]);
    }
    at += word.length;
  });
  return found;
}

// Pairs of places of common words; null beyond the limit.
function commonWords(a, b) {
  const reach = new Map([[1, 0]]);
  const trace = [];
  for (let edits = 0; edits <= a.length + b.length; edits++) {
    if (edits > MAX_EDITS) return null;
    trace.push(new Map(reach));
    for (let k = -edits; k <= edits; k += 2) {
      const down = k === -edits || (k !== edits && reach.get(k - 1) < reach.get(k + 1));
      let x = down ? reach.get(k + 1) : reach.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      reach.set(k, x);
      if (x >= a.length && x - k >= b.length) return backtrack(trace, a.length, b.length);
    }
  }
  return [];
}

function backtrack(trace, lengthA, lengthB) {
  const pairs = [];
  let x = lengthA;
  let y = lengthB;
  for (let edits = trace.length - 1; edits >= 0; edits--) {
    const reach = trace[edits];
    const k = x - y;
    const down = k === -edits || (k !== edits && reach.get(k - 1) < reach.get(k + 1));
    const before = down ? k + 1 : k - 1;
    const fromX = edits ? reach.get(before) : 0;
    const fromY = edits ? fromX - before : 0;
    while (x > fromX && y > fromY && x > 0 && y > 0) pairs.push([--x, --y]);
    if (edits) [x, y] = [fromX, fromY];
  }
  return pairs.reverse();
}
