# rlframe for CPUs: docker build -f docker/cpu.Dockerfile -t rlframe:cpu .
# What is installed, and how, is the Makefile's; --build-arg TORCH_INDEX=... is passed on to it.
FROM python:3.11-slim-bookworm

# make, and the compiler that torch uses at run time; wget is what KubeRay probes with.
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

ARG TORCH_INDEX=""
RUN make install VENV=/opt/venv TORCH_INDEX="$TORCH_INDEX" \
    && useradd --create-home --uid 1000 ray

ENV PATH=/opt/venv/bin:$PATH RAY_USAGE_STATS_ENABLED=0
USER 1000
WORKDIR /home/ray
CMD ["rlframe", "doctor"]
