# The demo in a container: docker build -t halfulp . && docker run --rm halfulp
# Where pip would take a torch with CUDA, name an index with CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /halfulp
COPY . .
RUN make .venv/.stamp-runtime
CMD ["make", "demo"]
