// The server's API: questions as streams of text, and the fleet's figures.  Addresses are relative, so that the page
// also works behind a proxy that serves it below a folder.

const KEY = "epdd-api-key"; // in sessionStorage: gone with the tab

export class ApiError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status; // 0: none
    this.code = code;
  }
}

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function get(address, options) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached");
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

// The server's error message, if it sent one.
async function failure(answer) {
  const { error } = await answer.json().catch(() => ({}));
  return new ApiError(error?.message ?? `The server answered ${answer.status} ${answer.statusText}`, answer.status,
    error?.code ?? "");
}

export async function status(signal) {
  return (await get("status", { headers: headers(), signal })).json();
}

export async function examples() {
  return (await get("page/examples.json")).json();
}

// The events of an answer, as the server streams them.
export async function* complete(body, signal) {
  const answer = await get("v1/chat/completions", {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (true) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError("The connection broke during the answer");
    });
    if (done) throw new ApiError("The connection ended before the answer did");
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, 0, chunk.error.code ?? "");
      yield chunk;
    }
  }
}
