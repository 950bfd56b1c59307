# Three images: `picker` (the last stage: a replica or a simulator), `edge`, which adds the Envoy that the tests run
# and the tools for its bootstrap, and `load`, which adds Locust.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
WORKDIR /src
RUN python -m venv /opt/picker
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY app app
COPY lua lua
# rich is what `picker top` and `picker audit` need; the other tools' packages stay out of the image.
RUN /opt/picker/bin/pip install --no-cache-dir --constraint requirements.lock '.[tracing]' rich

FROM build AS build-edge
RUN /opt/picker/bin/pip install --no-cache-dir --constraint requirements.lock '.[local]' \
 && /opt/picker/bin/pip uninstall --yes pip setuptools

FROM build AS build-load
RUN /opt/picker/bin/pip install --no-cache-dir --constraint requirements.lock locust \
 && /opt/picker/bin/pip uninstall --yes pip setuptools

FROM build AS build-picker
RUN /opt/picker/bin/pip uninstall --yes pip setuptools

# Common to all images: a user, and no tools to install anything.
FROM python:${PYTHON}-slim AS base
RUN groupadd --gid 10001 picker \
 && useradd --uid 10001 --gid picker --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin picker \
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
EXPOSE 8080 9901

FROM base AS load
COPY --from=build-load /opt/picker /opt/picker
EXPOSE 8089

FROM base AS picker
COPY --from=build-picker /opt/picker /opt/picker
EXPOSE 9002 8081
ENTRYPOINT ["picker"]
CMD ["serve", "--config", "/etc/picker/picker.yaml"]
