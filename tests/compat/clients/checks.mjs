// What the programs of clients for JavaScript share; see checks.py.
export const {COMPAT_URL: URL, COMPAT_GRPC: GRPC, COMPAT_KEY: KEY, COMPAT_MODEL: MODEL} = process.env;

const results = {};

export async function check(name, run) {
  try {
    await run();
    results[name] = "";
  } catch (error) {
    results[name] = `${error.constructor.name}: ${error.message}`.slice(0, 300);
  }
}

export function assert(holds, what = "it does not hold") {
  if (!holds) throw new Error(what);
}

export function finish(version) {
  console.log(JSON.stringify({version, checks: results}));
}
