"""A tool server for the test of the page: the Model Context Protocol's own package, over streamable HTTP, for pages of any
origin.

    python mcp_server.py PORT [json]     json: answers are JSON instead of event streams
"""

import asyncio
import sys

import uvicorn
from mcp.server import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.middleware.cors import CORSMiddleware

server = MCPServer("Mill tools")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def water_level(river: str) -> str:
    """How high the water stands.

    In centimetres, as the gauge at the mill says."""
    return f"The {river} stands at 42 cm."


@server.tool()
def fails() -> str:
    """Never works."""
    raise ValueError("the wheel is stuck")


@server.tool()
async def slow() -> str:
    """Takes a minute."""
    await asyncio.sleep(60)
    return "done"


if __name__ == "__main__":
    port = int(sys.argv[1])
    security = TransportSecuritySettings(allowed_hosts=["127.0.0.1:*"], allowed_origins=["http://127.0.0.1:*"])
    app = server.streamable_http_app(json_response="json" in sys.argv[2:], transport_security=security)
    app = CORSMiddleware(app, allow_origins=["*"], allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"],
                         expose_headers=["Mcp-Session-Id"])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
