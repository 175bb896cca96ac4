# A node as a service: docker build -t streamingnode . && docker run -v node:/data streamingnode
# Clients reach it at /data/node.sock in the volume, monitors inside of the container at 127.0.0.1:9464.
FROM python:3.13-slim AS build
COPY pyproject.toml requirements.lock README.md LICENSE /src/
COPY streamingnode /src/streamingnode
COPY spark_sink /src/spark_sink
COPY flusher /src/flusher
COPY interceptors /src/interceptors
COPY scanner /src/scanner
COPY wal /src/wal
# A constraint has no hashes where the package itself is built from a directory.
RUN python -m venv /opt/streamingnode \
 && sed -e 's/ *\\$//' -e '/--hash/d' /src/requirements.lock > /src/constraints.txt \
 && /opt/streamingnode/bin/pip install --no-cache-dir --constraint /src/constraints.txt '/src[http,speed]'

FROM python:3.13-slim
RUN useradd --system --uid 10001 --home-dir /data streamingnode && install -d -o streamingnode -m 0700 /data
COPY --from=build /opt/streamingnode /opt/streamingnode
ENV PATH=/opt/streamingnode/bin:$PATH PYTHONUNBUFFERED=1
USER streamingnode
VOLUME /data
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/livez', timeout=4)"]
ENTRYPOINT ["streamingnode", "serve", "/data", "--http", "127.0.0.1:9464", "--log-format", "json"]
