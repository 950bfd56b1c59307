# Builds three images: `picker` (the last stage: a replica or a simulator), `edge` with Envoy and the tool that writes
# Envoy's bootstrap, and `load` with Locust. pip checks each package's hash (deploy/images/*.lock).
# Pin the base image by digest: --build-arg BASE=python:3.11-slim@sha256:DIGEST.
ARG BASE=python:3.11-slim

# Build stages make the project's wheel and install it with this stage's pip, because the images have no pip.
FROM ${BASE} AS build
WORKDIR /src
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY deploy/images/build.lock ./
RUN python -m venv /opt/build && /opt/build/bin/pip install --require-hashes --requirement build.lock

FROM build AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY app app
COPY lua lua
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheel .

FROM build AS packages
COPY deploy/images/install.sh deploy/images/sbom.py ./
RUN python -m venv --without-pip /opt/picker

FROM packages AS build-edge
COPY deploy/images/edge.lock ./
RUN /opt/build/bin/pip --python /opt/picker/bin/python install --no-compile --require-hashes --requirement edge.lock
COPY --from=wheel /wheel /wheel
RUN sh install.sh edge.lock

FROM packages AS build-load
COPY deploy/images/load.lock ./
RUN /opt/build/bin/pip --python /opt/picker/bin/python install --no-compile --require-hashes --requirement load.lock
COPY --from=wheel /wheel /wheel
RUN sh install.sh load.lock

FROM packages AS build-picker
COPY deploy/images/picker.lock ./
RUN /opt/build/bin/pip --python /opt/picker/bin/python install --no-compile --require-hashes --requirement picker.lock
COPY --from=wheel /wheel /wheel
RUN sh install.sh picker.lock

# All images have the user `picker`, and no tools that install packages.
FROM ${BASE} AS base
RUN export SOURCE_DATE_EPOCH=0 \
 && groupadd --gid 10001 picker \
 && useradd --uid 10001 --gid picker --no-log-init --no-create-home --home-dir /nonexistent \
    --shell /usr/sbin/nologin picker \
 && python -c 'import ensurepip, shutil; shutil.rmtree(ensurepip.__path__[0])' \
 && pip uninstall --yes pip setuptools wheel
ENV PATH=/opt/picker/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 10001:10001

FROM base AS edge
COPY --from=build-edge /opt/picker /opt/picker
USER root
RUN ln -s "$(python -c 'import glob; print(glob.glob("/opt/picker/lib/python*/site-packages/envoy/_bin/envoy")[0])')" \
    /usr/local/bin/envoy
USER 10001:10001
EXPOSE 8080 8081 9901

FROM base AS load
COPY --from=build-load /opt/picker /opt/picker
EXPOSE 8089

FROM base AS picker
COPY --from=build-picker /opt/picker /opt/picker
EXPOSE 9002 8081
ENTRYPOINT ["picker"]
CMD ["serve", "--config", "/etc/picker/picker.yaml"]
