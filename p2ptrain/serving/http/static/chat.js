// A conversation over /v1/chat/completions. Text of models and servers is set as text, never parsed as markup.

const byId = (id) => document.getElementById(id);
const prompt = byId("prompt"), list = byId("messages"), state = byId("state");
const NEAR_THE_END = 80;

let model = "", key = "", messages = [], running = null;

function say(text, isBad = false) {
  state.textContent = text;
  state.className = isBad ? "bad" : "muted";
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  byId("key-form").hidden = answer.status !== 401;
  const told = await answer.json().catch(() => null);
  throw new Error(told?.error?.message ?? `the server answers ${answer.status}`);
}

async function findModel() {
  try {
    const known = await (await ask("/v1/models")).json();
    model = known.data[0].id;
    byId("model").textContent = model;
    byId("length").max = known.data[0].max_model_len;
    document.title = `${model} · p2ptrain chat`;
    byId("key-form").hidden = true;
    say("");
    prompt.focus();
  } catch (error) {
    say(error.message, true);
  }
}

function add(role) {
  const item = document.createElement("li"), title = document.createElement("h2"), text = document.createElement("div");
  item.className = role;
  title.textContent = role === "user" ? "You" : model;
  text.className = "text";
  item.append(title, text);
  list.append(item);
  byId("welcome").hidden = true;
  return { item, text };
}

// Yields the data of server-sent events. An event ends with an empty line, wherever the network cuts it.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

function settings() {
  const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));
  return { temperature: number("temperature"), max_completion_tokens: number("length"), seed: number("seed") };
}

function follow(change) {
  const page = document.documentElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_THE_END;
  change();
  if (isAtEnd) page.scrollTop = page.scrollHeight;
}

function speed(tokens, since) {
  const seconds = (performance.now() - since) / 1000;
  return tokens > 1 && seconds > 0 ? `${tokens} tokens, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
}

async function answer(shown, signal) {
  const system = byId("system").value.trim();
  const body = {
    model, stream: true, stream_options: { include_usage: true }, ...settings(),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
  };
  const headers = { "content-type": "application/json" };
  const response = await ask("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  let since = 0, pieces = 0, ending = "";
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (event.usage) say(speed(event.usage.completion_tokens, since) + ending);
    const piece = event.choices[0]?.delta?.content;
    if (piece) {
      since ||= performance.now();
      pieces += 1;
      follow(() => shown.text.append(piece));
      say(speed(pieces, since));
    }
    if (event.choices[0]?.finish_reason === "length") ending = ": cut at its longest length";
  }
  throw new Error("the server ended the answer early");
}

async function send() {
  const text = prompt.value.trim();
  if (!text || running || !model) return;
  prompt.value = "";
  follow(() => (add("user").text.textContent = text));
  messages.push({ role: "user", content: text });
  const shown = add("assistant"), conversation = messages;
  shown.item.classList.add("writing");
  list.setAttribute("aria-busy", "true");
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  say("Waiting for the first token …");
  try {
    await answer(shown, running.signal);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(error.message, true);
  }
  if (shown.text.textContent) conversation.push({ role: "assistant", content: shown.text.textContent });
  else {
    conversation.pop();
    shown.item.remove();
    if (conversation === messages) {
      list.lastElementChild?.remove();
      prompt.value ||= text;
    }
  }
  shown.item.classList.remove("writing");
  list.removeAttribute("aria-busy");
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  prompt.focus();
}

function stop() {
  running?.abort();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  findModel();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => {
  stop();
  messages = [];
  list.replaceChildren();
  byId("welcome").hidden = false;
  say("");
  prompt.focus();
});
findModel();
