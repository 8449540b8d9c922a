// A streamed conversation over gRPC. With Debian's libgrpc-java and protobuf-compiler-grpc-java-plugin:
//
//   protoc -I protos --plugin=protoc-gen-grpc-java=/usr/bin/grpc_java_plugin \
//       --java_out=build/java --grpc-java_out=build/java protos/inference.proto
//   javac -cp '/usr/share/java/*' -d build/java $(find build/java -name '*.java') examples/ChatGrpc.java
//   java -cp 'build/java:/usr/share/java/*' ChatGrpc 127.0.0.1:50051
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import tandem.v1.ChatMessage;
import tandem.v1.ChatRequest;
import tandem.v1.InferenceGrpc;
import tandem.v1.SamplingParams;

public class ChatGrpc {
  public static void main(String[] arguments) {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    ChatRequest request =
        ChatRequest.newBuilder()
            .addMessages(ChatMessage.newBuilder().setRole("user").setContent("Tell me a story."))
            .setSampling(SamplingParams.newBuilder().setMaxTokens(64))
            .build();
    InferenceGrpc.newBlockingStub(channel)
        .chat(request)
        .forEachRemaining(part -> System.out.print(part.getDelta().getContent()));
    System.out.println();
    channel.shutdown();
  }
}
