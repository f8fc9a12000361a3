"""An OpenAI-compatible server around one session.

    import foretoken
    from foretoken.serve import Settings, app

    session = foretoken.load("text-target", draft="text-draft")
    api = app(session, Settings(model_name="text-target"))  # a FastAPI, for any ASGI server

`foretoken serve` runs it with uvicorn.
"""

from __future__ import annotations

from foretoken.serve.application import app as app
from foretoken.serve.settings import Settings as Settings
