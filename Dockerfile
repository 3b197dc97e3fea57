# edgellm with its bundled pair: docker build -t edgellm . && docker run --rm edgellm chat "Where is my mug?"
# compose.yaml has a verifier and a pair that uses it. llama.cpp is compiled here, for the processor of this machine,
# in some minutes on all cores; for other machines: --build-arg CMAKE_ARGS="-DGGML_NATIVE=off -DGGML_AVX2=on -DGGML_FMA=on"

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
ARG CMAKE_ARGS=""
# The locked dependencies come first, so that a change of edgellm does not compile llama.cpp once more.
COPY tools/locks tools/locks
RUN pip install --no-cache-dir --no-deps --require-hashes -r tools/locks/build.txt \
    && pip wheel --no-cache-dir --no-deps --no-build-isolation --require-hashes -w /wheels -r tools/locks/run.txt
COPY pyproject.toml README.md LICENSE ./
COPY models/draft.gguf models/verifier.gguf models/profile.json models/
COPY edgellm edgellm
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels .

FROM python:${PYTHON}-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 libstdc++6 \
    && rm -rf /var/lib/apt/lists/*
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
RUN useradd --create-home edgellm && install -d -o edgellm -g edgellm /data
ENV EDGELLM_HOME=/data/edgellm HF_HOME=/data/huggingface
USER edgellm
WORKDIR /home/edgellm
VOLUME /data
ENTRYPOINT ["edgellm"]
CMD ["--help"]
