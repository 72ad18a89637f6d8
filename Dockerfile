# docker build -t sonicmoe . && docker run --rm --gpus all sonicmoe
ARG PYTORCH=2.13.0-cuda13.0-cudnn9-runtime
FROM pytorch/pytorch:${PYTORCH}

# Triton builds its launcher with a C compiler and Python.h.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE /sonicmoe/
COPY src /sonicmoe/src
# PyTorch and Triton are those of the image, in its own Python.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 pip install --no-cache-dir /sonicmoe

CMD ["sonicmoe", "doctor"]
