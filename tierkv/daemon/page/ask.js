// How the daemon is asked: with the token of this tab, where it has one.

const KEY = "tierkv-token";

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class Refused extends Error {}

const headers = () => (token.get() ? { Authorization: `Bearer ${token.get()}` } : {});

// The answer as an object. Refused: the token is missing or wrong; Error: anything else.
export async function ask(path, signal) {
  const answer = await fetch(path, { headers: headers(), signal, cache: "no-store" });
  if (answer.status === 401) throw new Refused(token.get() ? "This is not the daemon's token." : "");
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer.json();
}

// Server-sent events by hand, since EventSource sends no token. Ends with the connection.
export async function listen(path, signal, begun, hear) {
  const answer = await fetch(path, { headers: headers(), signal, cache: "no-store" });
  if (!answer.ok) throw new Error(`${answer.status} ${answer.statusText}`);
  begun();
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const messages = (left + value).split("\n\n");
    left = messages.pop();
    for (const message of messages) {
      const fields = Object.fromEntries(message.split("\n").map((line) => {
        const colon = line.indexOf(": ");
        return [line.slice(0, colon), line.slice(colon + 2)];
      }));
      if (fields.data) hear(fields.event, JSON.parse(fields.data), Number(fields.id));
    }
  }
}
