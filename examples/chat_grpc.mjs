// A streamed conversation over gRPC: npm install @grpc/grpc-js @grpc/proto-loader, then node examples/chat_grpc.mjs
import * as grpc from "@grpc/grpc-js";
import * as loader from "@grpc/proto-loader";

const definition = loader.loadSync("protos/inference.proto", {keepCase: true, enums: String});
const {Inference} = grpc.loadPackageDefinition(definition).tandem.v1;
const client = new Inference(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure());

const messages = [{role: "user", content: "Tell me a story."}];
for await (const part of client.Chat({messages, sampling: {max_tokens: 64}})) process.stdout.write(part.delta.content);
process.stdout.write("\n");
client.close();
