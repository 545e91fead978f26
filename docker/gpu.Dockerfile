# rlframe for NVIDIA GPUs: docker build -f docker/gpu.Dockerfile -t rlframe:gpu .
# CUDA's libraries come with the wheels of torch and vLLM, the driver from the host (NVIDIA Container Toolkit).
FROM python:3.11-slim-bookworm

# make, and the compiler that Triton uses at run time; wget is what KubeRay probes with.
RUN apt-get update \
    && apt-get install --no-install-recommends -y build-essential libnuma1 make wget \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1
WORKDIR /opt/rlframe
COPY Makefile pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY configs configs
COPY rlframe rlframe
COPY workers workers
COPY trainer trainer

RUN make install-gpu VENV=/opt/venv \
    && useradd --create-home --uid 1000 ray

ENV PATH=/opt/venv/bin:$PATH RAY_USAGE_STATS_ENABLED=0 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/ray
CMD ["rlframe", "doctor"]
