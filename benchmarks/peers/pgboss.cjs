// pg-boss by its fetch and complete, in a loop: its own worker polls at most twice a second.
const { createRequire } = require("node:module");
const load = createRequire(process.env.PGQUEUE_BENCH_NODE + "/");
const { PgBoss } = load("pg-boss");
const tally = require("./tally.cjs");

const QUEUE = "bench";
const BATCH = 1000;

async function main() {
  const boss = new PgBoss({ connectionString: process.env.PGQUEUE_BENCH_TARGET, schedule: false });
  boss.on("error", console.error);
  await boss.start();
  await boss.createQueue(QUEUE);
  if (process.argv[2] === "install") return boss.stop({ graceful: false });
  if (process.argv[2] === "fill") {
    const number = Number(process.argv[3]);
    const from = process.hrtime.bigint();
    for (let begin = 0; begin < number; begin += BATCH) {
      const jobs = [];
      for (let n = begin; n < Math.min(number, begin + BATCH); n++) {
        const to = `customer-${String(n).padStart(8, "0")}@example.com`;
        jobs.push({ data: { n, to, subject: "your order", lang: "en" } });
      }
      await boss.insert(QUEUE, jobs);
    }
    console.log(Number(process.hrtime.bigint() - from) / 1e9);
    return boss.stop({ graceful: false });
  }
  for (;;) {
    const jobs = await boss.fetch(QUEUE, { batchSize: BATCH });
    for (const job of jobs) if (job.data) tally.count();
    if (jobs.length) await boss.complete(QUEUE, jobs.map((job) => job.id));
    else await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

main().then(
  () => process.exit(0),
  (error) => {
    console.error(error);
    process.exit(1);
  },
);
