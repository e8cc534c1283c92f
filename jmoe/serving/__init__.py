"""An OpenAI-compatible server, and its routes without one."""

# What `jmoe[serve]` installs beside jmoe itself.
PACKAGES = (
    "fastapi",
    "httptools",
    "llguidance",
    "prometheus_client",
    "pydantic",
    "sse_starlette",
    "uvicorn",
)
