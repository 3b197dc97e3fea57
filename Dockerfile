# edgellm with its default pair: docker build -t edgellm . && docker run --rm edgellm chat "What is photosynthesis?"
# compose.yaml has a verifier and a pair that uses it. llama.cpp is the prebuilt one: no compiler is needed, and the image
# computes on any processor that has AVX2, or on an arm64 one.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheels
WORKDIR /src
# The locked dependencies come first, so that a change of edgellm does not fetch them once more.
COPY tools/locks tools/locks
RUN pip install --no-cache-dir --no-deps --require-hashes -r tools/locks/build.txt \
    && SKBUILD_WHEEL_CMAKE=false pip wheel --no-cache-dir --no-deps --no-build-isolation --require-hashes -w /wheels \
        -r tools/locks/run.txt -r tools/locks/binding.txt -r tools/locks/prebuilt.txt
COPY pyproject.toml README.md LICENSE ./
COPY models/draft.gguf models/verifier.gguf models/profile.json models/
COPY models/smollm2/draft.gguf models/smollm2/
COPY edgellm edgellm
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels .

FROM python:${PYTHON}-slim
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps --no-index /wheels/*.whl
RUN useradd --create-home edgellm && install -d -o edgellm -g edgellm /data
ENV EDGELLM_HOME=/data/edgellm HF_HOME=/data/huggingface
USER edgellm
WORKDIR /home/edgellm
# Docker copies it into each new volume. A folder that is mounted in its place hides it: then the first question fetches it.
RUN PIP_NO_CACHE_DIR=1 edgellm pull smollm2:135m
VOLUME /data
ENTRYPOINT ["edgellm"]
CMD ["--help"]
