# docker build --tag photoninfer .                                  for an NVIDIA GPU, CUDA 12
# docker build --tag photoninfer --build-arg CUDA=13 .              CUDA 13
# docker build --tag photoninfer:cpu --target cpu .                 no GPU, the default model inside
# docker build --build-arg MODEL=org/name --build-arg ARCHS="sm_80 sm_90a" .   its kernels and files inside

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN python -m venv /opt/photoninfer
ENV PATH=/opt/photoninfer/bin:$PATH

FROM build AS build-cpu
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-compile ".[otel]" && python -m compileall -q /opt/photoninfer
ENV PHOTON_CACHE_DIR=/opt/photoninfer/cache
RUN photoninfer pull

FROM build AS build-gpu
ARG CUDA=12
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-compile ".[cuda${CUDA},otel]" && python -m compileall -q /opt/photoninfer
ARG MODEL=""
ARG ARCHS=""
ENV PHOTON_CACHE_DIR=/opt/photoninfer/cache
RUN mkdir -p "$PHOTON_CACHE_DIR" && \
    for arch in $ARCHS; do photoninfer compile $MODEL --arch "$arch" || exit 1; done

FROM python:${PYTHON}-slim-bookworm AS run
RUN useradd --uid 10001 --no-create-home --home-dir /tmp photon && mkdir /cache && chown photon /cache
ENV PATH=/opt/photoninfer/bin:$PATH \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    CUPY_CACHE_DIR=/cache/cupy \
    PHOTON_HOST=0.0.0.0 \
    PHOTON_CACHE_DIR=/cache \
    PHOTON_SHARED_CACHE_DIR=/opt/photoninfer/cache
USER 10001
EXPOSE 5728
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ.get('PORT', os.environ.get('PHOTON_PORT', '5728')) + '/livez')"]
ENTRYPOINT ["photoninfer"]
CMD ["serve"]

FROM run AS cpu
COPY --from=build-cpu /opt/photoninfer /opt/photoninfer

FROM run AS gpu
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-gpu /opt/photoninfer /opt/photoninfer
