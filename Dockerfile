# p2ptrain in a container: docs/how-to/docker.md.
#
#   make wheels                                            fills wheels/, so that the build asks no registry for packages
#   docker build --build-arg PIP_OPTIONS=--no-index -t p2ptrain .
#   docker build --build-arg DEVICE=cuda -t p2ptrain:cuda .
#
# No step needs BuildKit. Nothing secret is copied: .dockerignore lets in only what is named there.

ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
# cpu or cuda. For cpu, put a CPU build of torch into wheels/, or name an index that has it in PIP_OPTIONS: the default
# index's build brings several gigabytes of CUDA libraries along.
ARG DEVICE=cpu
# Such as --no-index, --index-url URL or --extra-index-url URL.
ARG PIP_OPTIONS=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# pip is a tool of the build and stays out of the image. A folder that may be missing can be copied beside a file.
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/p2ptrain
COPY constraints.txt wheel[s] /wheels/
# Unlike -c, it holds for what builds the package, too.
ENV PIP_CONSTRAINT=/wheels/constraints.txt
COPY pyproject.toml /src/
RUN set -eu; \
    if [ "$DEVICE" = cuda ]; then rm -f /wheels/torch-*+cpu*; fi; \
    if [ "$DEVICE" = cpu ] && ! ls /wheels/torch-*+cpu* >/dev/null 2>&1; then \
        echo "note: no CPU build of torch in wheels/: see DEVICE in the Dockerfile" >&2; fi; \
    /tools/bin/python -c 'import tomllib; project = tomllib.load(open("/src/pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["grammar"], sep="\n")' \
        >/src/requirements.txt; \
    /tools/bin/pip --python /opt/p2ptrain/bin/python install --quiet --no-compile $PIP_OPTIONS \
        --find-links /wheels -r /src/requirements.txt; \
    cd "$(/opt/p2ptrain/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
    echo /opt/p2ptrain/app >p2ptrain-app.pth; \
    # What only developers of those packages need: tests, C++ headers, compilers.
    rm -rf torch/test torch/include torch/bin/*[Tt]est* torch/bin/protoc*; \
    find scipy sympy numpy networkx -name tests -type d -prune -exec rm -rf {} +; \
    if [ "$DEVICE" = cpu ]; then rm -f bitsandbytes/libbitsandbytes_cuda* bitsandbytes/libbitsandbytes_rocm* \
        bitsandbytes/libbitsandbytes_xpu*; fi; \
    # On all cores, which pip does on one. Some packages carry templates that are no Python; nobody imports them.
    /opt/p2ptrain/bin/python -m compileall -q -j 0 . >/dev/null || true

FROM ${BASE} AS library
# The compiler is a tool of the build and stays out of the image.
RUN command -v cc >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev; }
COPY p2ptrain/native /native
RUN python3 /native/build.py /native

FROM dependencies AS package
COPY pyproject.toml hatch_build.py README.md LICENSE /src/
COPY p2ptrain /src/p2ptrain
RUN /tools/bin/pip wheel --quiet $PIP_OPTIONS --find-links /wheels --no-deps -w /dist /src \
    && /tools/bin/pip --python /opt/p2ptrain/bin/python install --quiet --no-index --no-deps --target /opt/p2ptrain/app /dist/*.whl

FROM ${BASE}
# tini is process 1: it reaps what others leave behind, and passes SIGTERM on before Python has a handler for it.
RUN command -v tini >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends tini \
        && rm -rf /var/lib/apt/lists/*; }
# /link is for the one thing that peers of a swarm share as a file. New volumes get their owner from these folders.
RUN groupadd --gid 10001 p2ptrain \
    && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin p2ptrain \
    && install -d -o p2ptrain -g p2ptrain -m 0700 /data \
    && install -d -o p2ptrain -g p2ptrain -m 0755 /link
COPY --from=dependencies /opt/p2ptrain /opt/p2ptrain
COPY --from=package /opt/p2ptrain/app /opt/p2ptrain/app
COPY --from=library /native/libcodecs.so /native/libexact.so /opt/p2ptrain/app/p2ptrain/native/
COPY deploy/container/entrypoint.sh /usr/local/bin/p2ptrain-entrypoint
COPY deploy/container/health.py deploy/container/chaos.py deploy/container/trainer.toml \
    deploy/container/stage.toml /usr/local/share/p2ptrain/
ENV PATH=/opt/p2ptrain/app/bin:/opt/p2ptrain/bin:$PATH HOME=/data PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER p2ptrain
WORKDIR /data
# Keys, checkpoints, metrics.
VOLUME /data
EXPOSE 31337
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python3", "-I", "/usr/local/share/p2ptrain/health.py"]
ENTRYPOINT ["tini", "--", "p2ptrain-entrypoint"]
CMD ["--help"]
ARG VERSION=
ARG REVISION=
LABEL org.opencontainers.image.title="p2ptrain" \
    org.opencontainers.image.description="Train one model together, over the internet, on machines that come and go" \
    org.opencontainers.image.licenses="MIT" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"
