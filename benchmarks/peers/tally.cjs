// The same reports as pgqueue/bench/tally.py writes: see there. process.hrtime is CLOCK_MONOTONIC.
const fs = require("node:fs");
const path = require("node:path");

const marks = [];
const stamps = [];
let timer = null;
let written = 0;
const now = () => Number(process.hrtime.bigint()) / 1e9;

function write() {
  if (marks.length === written) return;
  written = marks.length;
  const tenths = [];
  for (let part = 0; part <= 10; part++) tenths.push(marks[Math.min(written - 1, Math.floor((part * written) / 10))]);
  const folder = process.env.PGQUEUE_BENCH_TALLY;
  const unfinished = path.join(folder, `.${process.pid}`);
  fs.writeFileSync(unfinished, JSON.stringify({ count: written, tenths, stamps }));
  fs.renameSync(unfinished, path.join(folder, `${process.pid}.json`));
}

function begin() {
  if (timer === null) timer = setInterval(write, stamps.length ? 300 : 10);
}

exports.count = () => {
  marks.push(now());
  begin();
};
exports.stamp = (number) => {
  stamps.push([number, now()]);
  marks.push(0);
  begin();
};
