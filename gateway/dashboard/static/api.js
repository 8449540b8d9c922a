// Talks to the gateway. The key lives in this tab's session storage and goes out as a header, never in an address.

const STORED = "tandem-key";

export class KeyNeeded extends Error {}
export class Refused extends Error {}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
  forget: () => sessionStorage.removeItem(STORED),
};

// The page is at …/dashboard; everything else is beside it.
const address = (path) => new URL(path, new URL("./", location.href));

export async function ask(path, options = {}) {
  const headers = {...options.headers};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(address(path), {...options, headers, cache: "no-store", credentials: "omit"});
  if (response.ok) return response;
  const message = await errorOf(response);
  throw response.status === 401 || response.status === 403 ? new KeyNeeded(message) : new Refused(message);
}

export async function read(path, options) {
  return (await ask(path, options)).json();
}

// The data of each server-sent event of an answer, as text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // the connection may have broken already
  }
}

async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status} ${response.statusText}`;
  }
}
