// Server-sent events, as this server and MCP servers send them.

// The data of each event, as text. Lines may end in CR LF or LF; lines that begin with a colon only keep the line open.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const raw of lines) {
      const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}
