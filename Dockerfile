# Both images: `docker build --target operator .` and `docker build --target agent .`.
# The test cluster makes the same images without an engine (`cargo lab help`).
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
ARG FLAGS='target.x86_64-unknown-linux-gnu.rustflags=["-C","target-feature=+crt-static"]'
RUN cargo build --release --locked --target x86_64-unknown-linux-gnu --config "$FLAGS" \
      -p windtunnel-operator -p windtunnel-agent

FROM scratch AS operator
COPY --from=build /src/target/x86_64-unknown-linux-gnu/release/windtunnel-operator /windtunnel-operator
USER 65532:65532
ENTRYPOINT ["/windtunnel-operator"]

FROM scratch AS agent
COPY --from=build /src/target/x86_64-unknown-linux-gnu/release/windtunnel-agent /windtunnel-agent
ENTRYPOINT ["/windtunnel-agent"]
