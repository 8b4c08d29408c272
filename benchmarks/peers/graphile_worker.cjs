// One graphile-worker process, as its documentation on performance configures it.
const { createRequire } = require("node:module");
const load = createRequire(process.env.PGQUEUE_BENCH_NODE + "/");
const { run, runMigrations, Logger } = load("graphile-worker");
const tally = require("./tally.cjs");

const preset = {
  worker: {
    connectionString: process.env.PGQUEUE_BENCH_TARGET,
    concurrentJobs: 24,
    maxPoolSize: 25,
    pollInterval: 2000,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger: new Logger(() => () => {}),
  },
};

async function main() {
  if (process.argv[2] === "install") return runMigrations({ preset });
  const taskList = { count: async () => tally.count(), stamp: async (payload) => tally.stamp(payload.number) };
  return (await run({ preset, taskList })).promise;
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
