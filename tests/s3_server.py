"""An S3-compatible server in a process of its own, on a port of its own; one request at a time, so that a conditional
request is decided as a store decides it.
"""

from __future__ import annotations

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

if __name__ == "__main__":
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=False)  # pyright: ignore[reportArgumentType]
    print(server.server_port, flush=True)
    server.serve_forever()
